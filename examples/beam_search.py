"""Beam search of a whole model: hypotheses are rows of one decode and share their context's blocks.

python examples/beam_search.py CHECKPOINT --beams 4 --tokens 16 --prompt 1 15043 29892
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from polyattn import LayerSpec, resolve_device, select_layers
from polyattn.tools.replay.beam_search import BeamSearch
from polyattn.tools.replay.model.decoder import Decoder
from polyattn.tools.replay.model.fields import Fields
from polyattn.tools.replay.model.step import GroupMemory
from polyattn.tools.replay.model.weights import Checkpoint, load
from polyattn.tools.replay.runners import Options

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("checkpoint", type=Path)
parser.add_argument("--beams", type=int, default=4)
parser.add_argument("--tokens", type=int, default=16)
parser.add_argument("--end", type=int, help="the token that ends a hypothesis")
parser.add_argument("--prompt", type=int, nargs="+", required=True, help="token ids")
options = parser.parse_args()

specs = [spec.replace(block_size=16) for spec in LayerSpec.from_hf_config(options.checkpoint)]
groups = select_layers(specs)
model = Decoder(Fields(options.checkpoint), specs)
load(model, Checkpoint(options.checkpoint), torch.device(str(resolve_device(None).torch_device)))
blocks = -(-len(options.prompt) // 16) + options.beams * (options.tokens // 16 + 3)
memories = [GroupMemory(group, Options(layers=len(specs)), blocks) for group in groups]
search = BeamSearch(model, memories, options.beams, options.tokens, options.end)
for found in search.run([options.prompt])[0]:
    print(f"{found.score:8.4f}  {list(found.tokens)}")
print(f"{search.copied} blocks copied before they were written to")
