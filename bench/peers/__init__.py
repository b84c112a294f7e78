"""Other people's runtimes, measured beside qoff in the same run on the same machine.

- `llama_cpp`: llama.cpp, by the package xllamacpp.
"""
