"""Tiny transformers models with a device map over all GPUs: do they give the tokens of one GPU?

Run by bench/many_gpus.py: ``spread_model.py GPUS`` prints one JSON object.
"""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

TESTS = Path(__file__).resolve().parents[1] / "tests"
NEEDED = ("transformers", "accelerate")
LAYERS_PER_GPU = 2
FEWEST_LAYERS = 4


def measure(gpus: int) -> dict[str, Any]:
    """Run each kind of model on one GPU, over all of them, and over all of them in reverse order."""
    sys.path.insert(0, str(TESTS))
    from integrations import peers

    from deepgemm_jit.integrations import transformers as integration

    torch.manual_seed(0)
    integration.register()
    layers = max(FEWEST_LAYERS, LAYERS_PER_GPU * gpus)
    rows = []
    for kind in peers.MODELS:
        for activations in ("dynamic", "static"):
            model = peers.fp8_model(kind, scheme=activations, num_hidden_layers=layers)
            model.set_experts_implementation(integration.NAME)
            prompt = peers.random_prompts()
            placements = {"one": [0], "all": list(range(gpus)), "reversed": list(reversed(range(gpus)))}
            results = {name: _run(peers, integration, model, placed, prompt) for name, placed in placements.items()}
            one = results["one"]
            rows.append(
                {
                    "model": kind,
                    "activations": activations,
                    "layers": layers,
                    "distinct_tokens": int(one["tokens"][:, prompt.size(1) :].unique().numel()),
                    "finite": all(bool(result["logits"].isfinite().all()) for result in results.values()),
                    "gpus": {name: result["gpus"] for name, result in results.items()},
                    "same_tokens": {name: torch.equal(result["tokens"], one["tokens"]) for name, result in results.items()},
                    "same_logits": {name: torch.equal(result["logits"], one["logits"]) for name, result in results.items()},
                }
            )
    return {"rows": rows}


def _run(peers: Any, integration: Any, model: torch.nn.Module, placed: list[int], prompt: torch.Tensor) -> dict[str, Any]:
    twin, prompt = peers.spread(model, placed), prompt.to(f"cuda:{placed[0]}")
    skipped = integration.accelerate_linears(twin).skipped
    if skipped:
        raise RuntimeError(f"linears without our forward: {skipped}")
    tokens = peers.greedy(twin, prompt)
    with torch.no_grad():
        logits = twin(prompt).logits.cpu()
    return {"tokens": tokens, "logits": logits, "gpus": sorted({p.device.index for p in twin.parameters()})}


def main() -> int:
    missing = [name for name in NEEDED if find_spec(name) is None]
    print(json.dumps({"not_run": f"no {' and no '.join(missing)} here"} if missing else measure(int(sys.argv[1]))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
