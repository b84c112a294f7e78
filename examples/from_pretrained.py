"""A transformers model with packed weights: python examples/from_pretrained.py MODEL"""

import argparse

from transformers import AutoModelForCausalLM, AutoTokenizer

import qoff

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("model")
path = parser.parse_args().model  # not quantized yet; a checkpoint of qoff needs no config
config = qoff.QoffConfig(bits=4, group_size=32)
model = AutoModelForCausalLM.from_pretrained(path, quantization_config=config)
tokenizer = AutoTokenizer.from_pretrained(path)
inputs = tokenizer("The three laws of robotics are", return_tensors="pt")
output = model.generate(**inputs, max_new_tokens=32)
print(tokenizer.decode(output[0], skip_special_tokens=True))
