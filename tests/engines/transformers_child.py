"""Runs the V4 model of transformers once, for another process.

python transformers_child.py REQUEST        a JSON object; the answer goes to a file it names
"""

import json
import sys

import numpy as np
import torch
from transformers import DeepseekV4ForCausalLM, FineGrainedFP8Config


def answer(request) -> None:
    torch.set_num_threads(2)
    model, loading = DeepseekV4ForCausalLM.from_pretrained(
        request["folder"],
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        quantization_config=FineGrainedFP8Config(dequantize=True),
        output_loading_info=True,
    )
    assert not any(map(len, loading.values())), loading
    outputs = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda *seen: outputs.append(seen[-1][0].mean(dim=1)))
    with torch.no_grad():
        logits = model.eval()(torch.tensor([request["tokens"]]), use_cache=False).logits[0]
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    np.savez(
        request["answer"],
        logits=logits.numpy(),
        outputs=torch.stack(outputs).numpy(),
        **{name: named[name].detach().numpy() for name in request["parameters"]},
    )


if __name__ == "__main__":
    answer(json.loads(sys.argv[1]))
