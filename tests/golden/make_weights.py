"""Write weights of three small random models as PyTorch's libraries do, and their outputs.

Run in an environment with torch, transformers and safetensors::

    python tests/golden/make_weights.py

Each folder of ``tests/golden/weights`` has the files of ``save_pretrained`` (or of
`safetensors.torch.save_file`), and ``golden.npz`` with an input and the logits.
"""

import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

FOLDER = Path(__file__).parent / "weights"
TOKENS = np.random.RandomState(0).randint(0, 320, (4, 7))


def record(name, logits, **inputs):
    np.savez(FOLDER / name / "golden.npz", logits=logits.detach().numpy(), **inputs)


def language_model(name, model, **options):
    for p in model.parameters():  # norms and biases are ones and zeros otherwise
        p.data += 0.05 * torch.randn_like(p)
    model.save_pretrained(FOLDER / name, **options)
    (FOLDER / name / "generation_config.json").unlink()
    record(name, model.eval()(torch.tensor(TOKENS)).logits, tokens=TOKENS)


def gpt2():
    config = GPT2Config(vocab_size=320, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    language_model("gpt2", GPT2LMHeadModel(config))


def llama():
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        tie_word_embeddings=False,
    )
    language_model("llama", LlamaForCausalLM(config), max_shard_size="30KB")


def convolutions():
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3),
        torch.nn.ReLU(),
        torch.nn.Conv2d(8, 8, 3, stride=2),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(8 * 2 * 2, 10),
    )
    images = np.random.RandomState(1).randn(4, 3, 8, 8).astype("float32")
    (FOLDER / "convolutions").mkdir()
    save_file(model.state_dict(), FOLDER / "convolutions" / "model.safetensors")
    record("convolutions", model(torch.tensor(images)), images=images)


if __name__ == "__main__":
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    torch.manual_seed(0)
    gpt2()
    llama()
    convolutions()
