"""A server that compiles nothing: every kernel that its requests can ask for is there, or it does not start.

    deepgemm-jit warmup --arch sm_90a --model MODEL      # anywhere, once; or ship a pack in DEEPGEMM_JIT_PACKS
    python examples/serve_sealed.py --model MODEL [--max-tokens N] [--port N]

MODEL is a config.json or the folder of one. The start-up has four steps, which any server can take:

1. plan: name every kernel that requests of up to N tokens can ask for;
2. seal: from here on a compile is an error;
3. fetch: take every kernel from the store or a pack; if one is missing, print the command that builds it and exit with 1;
4. load: on each GPU, load them and prepare the weights, so that the first request finds all done.

It then answers GET /ready with the state, and POST /forward with {"tokens": n} by one forward of one experts layer with random
weights on random tokens. Steps 1 to 3 need neither torch nor a GPU. Where step 4 cannot be taken the server still starts: /ready
and /forward say why, with status 503.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from deepgemm_jit.errors import DeepGemmJitError, KernelNotBuiltError, UnsupportedError
from deepgemm_jit.runtime import driver_report
from deepgemm_jit.service import KernelService, default_service
from deepgemm_jit.warmup import Plan, plan_for

ARCH = "sm_90a"
BLOCK = 128
MOST_BODY_BYTES = 1024
USAGE = "GET /ready or POST /forward"
log = logging.getLogger("serve_sealed")


class Refused(Exception):
    """A request that is not served, with the HTTP status that says so."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a layer is made of."""

    hidden: int
    width: int
    experts: int
    top_k: int


def sizes_of(path: str) -> Sizes:
    """Read the sizes of the experts, by the keys that Qwen and DeepSeek use.

    Raises:
        UnsupportedError: other keys, or weights other than FP8 with a scale per 128 x 128 block: no layer of those is made here.
    """
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    config = json.loads(file.read_text())
    supported = "here, FP8 experts of Qwen and DeepSeek"
    try:
        quantization = config["quantization_config"]
        if quantization["weight_block_size"] != [BLOCK, BLOCK]:
            raise KeyError("weight_block_size of 128 x 128")
        if "fp4" in (config.get("expert_dtype"), quantization.get("expert_dtype")):
            raise UnsupportedError(given=f"{file} with FP4 experts", supported=supported)
        experts = config["num_experts"] if "num_experts" in config else config["n_routed_experts"]
        return Sizes(config["hidden_size"], config["moe_intermediate_size"], experts, config["num_experts_per_tok"])
    except KeyError as missing:
        raise UnsupportedError(given=f"{file} without {missing}", supported=supported) from None


class Layer:
    """One experts layer on one device, with random FP8 weights."""

    def __init__(self, sizes: Sizes, device: str) -> None:
        import torch

        from deepgemm_jit import ops

        self.sizes, self.device = sizes, torch.device(device)

        def weights(n: int, k: int) -> tuple[Any, Any]:
            values = torch.empty((sizes.experts, n, k), dtype=torch.float8_e4m3fn, device=self.device)
            for expert in values:  # one by one: the random numbers take four times the memory of the weights
                expert.copy_(torch.randn((n, k), device=self.device))
            return values, torch.full((sizes.experts, -(-n // BLOCK), -(-k // BLOCK)), 0.02, device=self.device)

        gate_up, gate_up_scale = weights(2 * sizes.width, sizes.hidden)
        down, down_scale = weights(sizes.hidden, sizes.width)
        self.experts = ops.prepare_experts(gate_up, down, gate_up_scale, down_scale)

    def forward(self, tokens: int) -> dict[str, Any]:
        """Run random tokens through the experts and return what there is to say of it."""
        import torch

        from deepgemm_jit import ops

        hidden = torch.randn((tokens, self.sizes.hidden), dtype=torch.bfloat16, device=self.device)
        scores = torch.rand((tokens, self.sizes.experts), device=self.device)
        weights, index = scores.softmax(-1).topk(self.sizes.top_k)
        torch.cuda.synchronize(self.device)
        start = time.perf_counter()
        out = ops.fp8_experts(hidden, index, weights, self.experts)
        torch.cuda.synchronize(self.device)
        milliseconds = 1e3 * (time.perf_counter() - start)
        return {"tokens": tokens, "gpu": str(self.device), "ms": milliseconds, "finite": bool(out.isfinite().all())}


@dataclass(frozen=True, slots=True)
class Server:
    """What a start-up leaves: the plan that was proven, and the layers that serve it or why there are none."""

    plan: Plan
    max_tokens: int
    layers: tuple[Layer, ...]
    not_ready: str

    def state(self) -> dict[str, Any]:
        """Return what /ready answers."""
        return {
            "ready": not self.not_ready,
            "kernels": len(self.plan.kernels),
            "gpus": len(self.layers),
            "reason": self.not_ready,
        }


def start(path: str, max_tokens: int) -> Server:
    """Take the four steps.

    Raises:
        KernelNotBuiltError: a kernel of the plan is neither in the store nor in a pack.
        DeepGemmJitError: the model, a setting, the store or a GPU is refused.
    """
    plan, service = plan_for(ARCH, path, max_tokens=max_tokens), default_service()
    sizes = sizes_of(path)
    service.seal()
    service.prepare(plan.kernels, [])  # on no GPU yet: it fetches
    log.info("%d kernels are there; sealed: nothing compiles from here on", len(plan.kernels))
    layers, not_ready = load(service, plan, sizes)
    return Server(plan, max_tokens, layers, not_ready)


def load(service: KernelService, plan: Plan, sizes: Sizes) -> tuple[tuple[Layer, ...], str]:
    """Load the kernels and prepare the weights on each GPU; return the layers, or none and the reason."""
    report = driver_report()
    if report.error is not None:
        return (), report.error
    gpus = [gpu.ordinal for gpu in report.gpus]
    service.prepare(plan.kernels, gpus)
    try:
        layers = tuple(Layer(sizes, f"cuda:{gpu}") for gpu in gpus)
    except ImportError as error:
        return (), f"the kernels are loaded, but the layer needs torch: {error}"
    for layer in layers:
        layer.forward(1)  # the libraries below torch start here, not in a request
    return layers, ""


def tokens_of(body: bytes, most: int) -> int:
    """Return the tokens that a request asks for; refuses what is none, and what no kernel was planned for."""
    try:
        tokens = json.loads(body)["tokens"]
    except (ValueError, TypeError, KeyError):
        tokens = None
    if type(tokens) is not int or tokens < 1:
        raise Refused(400, 'the body must be {"tokens": n} with n at least 1')
    if tokens > most:
        raise Refused(413, f"{tokens} tokens; the kernels were planned for up to {most}")
    return tokens


class Http(ThreadingHTTPServer):
    """Answers requests, each in a thread of its own, on the GPUs in turn.

    It takes its address at once, so that one that is not to be had ends the start-up before it begins, and listens when it is
    told what to serve.
    """

    served: Server
    turns: Iterator[Layer]

    def __init__(self, address: tuple[str, int]) -> None:
        super().__init__(address, Handler, bind_and_activate=False)
        self.server_bind()

    def listen(self, server: Server) -> None:
        """Take connections from here on."""
        self.served, self.turns = server, itertools.cycle(server.layers)
        self.server_activate()


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: Http

    def do_GET(self) -> None:
        """Answer whether requests are served."""
        if self.path != "/ready":
            return self.answer(404, {"error": USAGE})
        return self.answer(503 if self.server.served.not_ready else 200, self.server.served.state())

    def do_POST(self) -> None:
        """Answer a forward."""
        try:
            self.answer(200, self.forward())
        except Refused as refused:
            self.answer(refused.status, {"error": str(refused)})
        except DeepGemmJitError as error:  # a KernelNotBuiltError would mean that the plan was wrong; it names the kernel
            self.answer(500, {"error": f"{type(error).__name__}: {error}"})

    def forward(self) -> dict[str, Any]:
        """Run the forward that was asked for."""
        if self.path != "/forward":
            raise Refused(404, USAGE)
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MOST_BODY_BYTES:
            raise Refused(411, f"a body of at most {MOST_BODY_BYTES} bytes with its Content-Length is needed")
        tokens = tokens_of(self.rfile.read(int(length)), self.server.served.max_tokens)
        if self.server.served.not_ready:
            raise Refused(503, self.server.served.not_ready)
        return next(self.server.turns).forward(tokens)

    def answer(self, status: int, payload: dict[str, Any]) -> None:
        """Send one JSON object."""
        body = json.dumps(payload).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002 - the name that it has above
        """Log where everything else is logged."""
        log.info(format, *arguments)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a config.json, or the folder of one")
    parser.add_argument("--max-tokens", type=int, default=4096, help="most tokens of a request (default: %(default)s)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen at, 0 for any (default: %(default)s)")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        http = Http((arguments.host, arguments.port))
    except (OSError, OverflowError) as error:
        log.error("not started: no listening at %s, port %d: %s", arguments.host, arguments.port, error)
        return 1
    with http:
        try:
            server = start(arguments.model, arguments.max_tokens)
        except KernelNotBuiltError as missing:
            sizes = shlex.join(["--model", arguments.model, "--max-tokens", str(arguments.max_tokens)])
            log.error("not started, as nothing may be compiled here: %s %s", missing, sizes)
            return 1
        except DeepGemmJitError as error:
            log.error("not started: %s", error)
            return 1
        if server.not_ready:
            log.warning("started without a GPU: %s", server.not_ready)
        http.listen(server)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        print(f"http://{arguments.host}:{http.server_port}", flush=True)
        try:
            http.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
