"""What a packed KV cache costs on a text: python examples/accuracy.py MODEL TEXT

`qoff eval` does this with error estimates, reference models and tables; see docs/accuracy.md.
"""

import argparse
import math
from pathlib import Path

import torch

import qoff

TOKENS, PIECE = 256, 32  # tokens of the text; a piece attends to those before it, packed

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("model")
parser.add_argument("text", type=Path, help="a file, of 256 tokens or more")
args = parser.parse_args()
text = args.text.read_text()
for name, kv in {"float32": None, "4 bits": qoff.KVQuant(4, 4, window=0)}.items():
    model, tokenizer = qoff.load(args.model, kv=kv)
    with model, torch.inference_mode():
        ids = tokenizer(text, return_tensors="pt").input_ids[:, :TOKENS]
        cache = qoff.QoffCache(model)
        pieces = ids[:, :-1].split(PIECE, dim=1)
        logits = torch.cat([model(x, cache=cache).logits for x in pieces], dim=1)
        loss = torch.nn.functional.cross_entropy(logits[0], ids[0, 1:])
    print(f"KV cache in {name}: perplexity {math.exp(loss):.3f}")
