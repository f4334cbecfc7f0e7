"""Train a byte-level GPT across pipeline stages, one process each.

    torchrun --standalone --nproc-per-node 4 examples/train_gpt.py

Everything but the four lines that mention ``pipe`` is what any PyTorch training script has.
"""

import argparse
import time
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record

import rrfp

WIDTH, HEADS, LAYERS, LENGTH = 96, 4, 4, 128


class Block(nn.Module):
    """A transformer block with causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        y: Tensor = x + self.mlp(self.mlp_norm(x))
        return y


class Embedding(nn.Module):
    """Bytes and positions to vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        return x


def build_stage(stage: int, stages: int) -> nn.Module:
    """This rank's part of the model."""
    torch.manual_seed(stage)
    parts: list[nn.Module] = [Embedding()] if stage == 0 else []
    parts += [Block() for layer in range(LAYERS) if layer * stages // LAYERS == stage]
    if stage == stages - 1:
        parts += [nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)]
    return nn.Sequential(*parts)


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of the next byte."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch(data: Tensor, microbatches: int, size: int, generator: torch.Generator) -> tuple[list[Tensor], list[Tensor]]:
    """Inputs and targets, lists by microbatch; the same on every rank, because the generator is."""
    starts = torch.randint(len(data) - LENGTH - 1, (microbatches, size, 1), generator=generator)
    tokens = data[starts + torch.arange(LENGTH + 1)].long()
    return list(tokens[..., :-1].unbind()), list(tokens[..., 1:].unbind())


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--microbatches", type=int, default=24)
    parser.add_argument("--microbatch-size", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--hint", default="bf")
    parser.add_argument("--limit", default="2n", help="microbatches that a stage may hold: a number, 1f1b or 2n")
    parser.add_argument("--transport", default="zmq")
    parser.add_argument("--evaluate-every", type=int, default=50)
    parser.add_argument("--text", type=Path, help="a file to learn instead of Python's language reference")
    return parser.parse_args()


def main() -> None:
    """Train."""
    args = arguments()
    torch.set_num_threads(1)
    topology = rrfp.Topology.from_env()
    module = build_stage(topology.stage, topology.stages)
    optimizer = torch.optim.AdamW(module.parameters(), lr=args.lr)
    text = args.text.read_bytes() if args.text else "\n\n".join(topics[name] for name in sorted(topics)).encode()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    training, held_out = data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]
    generator = torch.Generator().manual_seed(0)

    def draw(part: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        return batch(part, args.microbatches, args.microbatch_size, generator)

    pipeline = rrfp.Pipeline(
        module, topology=topology, transport=args.transport, hint=args.hint, limit=args.limit, loss_fn=loss_fn
    )
    with pipeline.blocking() as pipe:
        for step in range(1, args.steps + 1):
            started = time.perf_counter()
            result = pipe.step(*draw(training))
            optimizer.step()
            optimizer.zero_grad()
            if topology.stage == 0 and (step <= 3 or step % 10 == 0):
                idle = sum(part.blocking_share for part in result.breakdown) / topology.stages
                took = (time.perf_counter() - started) * 1e3
                print(f"step {step:4d}  loss {result.loss:.3f}  {took:5.0f} ms  idle {idle:4.0%}", flush=True)
            if step % args.evaluate_every == 0:
                score = pipe.evaluate(*draw(held_out))
                if topology.stage == 0:
                    print(f"step {step:4d}  held-out loss {score.loss:.3f}", flush=True)


if __name__ == "__main__":
    record(main)()
