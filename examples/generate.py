"""Load a model under a memory budget and generate: python examples/generate.py MODEL 1GiB"""

import sys

import qoff

model_path, device_memory = sys.argv[1:]
model, tokenizer = qoff.load(model_path, device_memory=device_memory)
with model:
    inputs = tokenizer("The three laws of robotics are", return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=32)
    print(tokenizer.decode(output[0], skip_special_tokens=True))
