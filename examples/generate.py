"""Load a model under a memory budget and generate: python examples/generate.py MODEL 1GiB"""

import argparse

import qoff

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("model")
parser.add_argument("device_memory", help="a size like 1GiB")
args = parser.parse_args()
model, tokenizer = qoff.load(args.model, device_memory=args.device_memory)
with model:
    inputs = tokenizer("The three laws of robotics are", return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=32)
    print(tokenizer.decode(output[0], skip_special_tokens=True))
