"""OpenAI's requests and documents, without HTTP."""
