"""Answer many prompts with a plan: python examples/many_prompts.py MODEL"""

import argparse

import qoff

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("model")
args = parser.parse_args()
prompts = [f"Write a sentence about the number {number}." for number in range(12)]
plan = qoff.Plan(
    batch_size=4,
    batches=2,  # 8 sequences at a time; a layer's weights are read once for all of them
    context=128,  # tokens of prompt and answer
    kv=qoff.KVQuant(4, 4),
    kv_placement=qoff.KVPlacement(0.5, 0.5),  # the older half of the cache in host memory
)
params = qoff.SamplingParams(temperature=0, max_tokens=32)
with qoff.LLM(args.model, plan) as llm:
    for result in llm.generate(prompts, params):  # in the order of the prompts
        print(result.index, result.text)
