"""Fine-tune a causal language model of transformers on texts of different lengths.

    python examples/finetune_hf.py                                             # all stages in this process
    torchrun --standalone --nproc-per-node 2 examples/finetune_hf.py           # one stage a process
    torchrun --standalone --nproc-per-node 4 examples/finetune_hf.py --model NAME --text FILE --save FOLDER

Without ``--model`` it trains a tiny Llama with random weights, on bytes: nothing is downloaded.
"""

import argparse
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import rrfp
from rrfp import checkpoint


def load(name: str | None) -> tuple[Any, Any]:
    """The whole model, the same on every rank, and a function from texts to padded tensors."""
    if name is not None:
        tokenizer = AutoTokenizer.from_pretrained(name, padding_side="right")
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        how = {"padding": True, "truncation": True, "max_length": 512, "return_token_type_ids": False}
        return AutoModelForCausalLM.from_pretrained(name), lambda texts: tokenizer(texts, return_tensors="pt", **how)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=256, tie_word_embeddings=True, **sizes))

    def encode(texts: list[str]) -> dict[str, torch.Tensor]:
        rows = [torch.tensor(list(text.encode())) for text in texts]
        masks = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        return {"input_ids": pad_sequence(rows, batch_first=True), "attention_mask": masks}

    return model, encode


def batch(encode: Any, texts: list[str], rows: int = 4) -> tuple[list[Any], list[torch.Tensor], list[int]]:
    """Lists by microbatch: inputs, labels, and how many tokens each predicts. Texts of one length go together."""
    texts = sorted(texts, key=len)
    inputs = [dict(encode(texts[start : start + rows])) for start in range(0, len(texts), rows)]
    labels = [each["input_ids"].masked_fill(each["attention_mask"] == 0, -100) for each in inputs]
    return inputs, labels, [int((each[:, 1:] != -100).sum()) for each in labels]


@record
def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a name on the hub or a folder")
    parser.add_argument("--text", type=Path, help="texts to learn, one a line; default: Python's reference")
    parser.add_argument("--stages", type=int, default=2, help="in one process; under torchrun as many as ranks")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--save", type=Path, help="folder for the trained model")
    args = parser.parse_args()
    torch.set_num_threads(1)
    topology = rrfp.Topology.from_env() if dist.is_torchelastic_launched() else None
    model, encode = load(args.model)
    text = args.text.read_text() if args.text else "\n".join(topics.values())
    texts = [line.strip()[:256] for line in text.splitlines() if len(line.strip()) > 1]

    split = rrfp.split(model, topology.stages if topology else args.stages)
    stage = split[topology.stage] if topology else None
    pipeline = stage.pipeline(topology) if stage else split.local()
    optimizer = torch.optim.AdamW((stage or model).parameters(), lr=1e-5 if args.model else 1e-2)
    with pipeline as pipe:
        for step in range(args.steps):
            inputs, labels, weights = batch(encode, texts[step * 32 : step * 32 + 32])
            result = pipe.step(inputs, labels, weights=weights, sizes=weights)
            norm = pipe.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            if topology is None or topology.rank == 0:
                print(f"step {step}: loss {result.loss:.4f}, norm {norm:.3f}", flush=True)
    if args.save:
        if stage:
            dist.init_process_group("gloo")
        checkpoint.save_pretrained(args.save, stage or split)
        if stage:
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
