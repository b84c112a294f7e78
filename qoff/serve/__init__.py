"""`qoff serve`: OpenAI's API over HTTP, answered by one `qoff.LLM`."""
