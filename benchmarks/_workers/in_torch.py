"""One of PyTorch's workers, DistributedDataParallel over Gloo, where PyTorch is installed."""

import json
import os

import torch
from torch import nn
from torch.nn import functional

from benchmarks._workers import networks
from benchmarks._workers.serve import eager, is_eager, serve


def main() -> None:
    if is_eager():
        eager(first_eager_step)
        return
    config = json.loads(os.environ["TF_CONFIG"])
    workers = config["cluster"]["worker"]
    torch.set_num_threads(1)  # as torchrun does: the machine has a core for each worker
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"tcp://{workers[0]}",
        world_size=len(workers),
        rank=config["task"]["index"],
    )
    makers = {**networks.all_reduces(all_reduce), **networks.trainers(trainer, LOSSES)}
    serve(makers, lambda _: None)
    torch.distributed.destroy_process_group()


def all_reduce(size):
    value = torch.ones(size)

    def one():
        torch.distributed.all_reduce(value)
        value.div_(2)

    return one


class Network(nn.Module):
    def __init__(self, loss, initial):
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.from_numpy(w)) for w in initial])
        self.loss = loss

    def forward(self, *batch):
        return self.loss(list(self.weights), *batch)


def first_eager_step():
    """Of one replica: there are no two devices of a process on CPUs."""
    loop(Network(mlp_loss, networks.mlp_weights()), networks.mlp_batch())()


def trainer(loss, initial, batch):
    return loop(nn.parallel.DistributedDataParallel(Network(loss, initial)), batch)


def loop(network, batch):
    optimizer = torch.optim.SGD(network.parameters(), lr=networks.RATE)
    batch = [torch.from_numpy(x.copy()) for x in batch]

    def one():
        optimizer.zero_grad()
        network(*batch).backward()
        optimizer.step()

    return one


def mlp_loss(weights, x, y):
    for i in range(0, len(weights), 2):
        x = x @ weights[i] + weights[i + 1]
        x = torch.relu(x) if i < len(weights) - 2 else x
    return functional.cross_entropy(x, y.long())


def cnn_loss(weights, x, y):
    x = x.permute(0, 3, 1, 2)  # in memory as before: the layout that is fast on CPUs
    for kernel in weights[:2]:
        x = functional.conv2d(x, kernel.permute(3, 2, 0, 1), padding="same")
        x = functional.max_pool2d(torch.relu(x), 2)
    x = x.permute(0, 2, 3, 1).reshape(len(x), -1)
    return functional.cross_entropy(x @ weights[2] + weights[3], y.long())


def transformer_loss(weights, tokens, following):
    embedding, positions, *blocks, out = weights
    n, t = tokens.shape
    heads, each = networks.HEADS, networks.WIDTH // networks.HEADS
    hidden = (embedding[tokens] + positions).reshape(n * t, -1)
    for i in range(0, len(blocks), 4):
        to_qkv, to_hidden, up, down = blocks[i : i + 4]
        qkv = (normalised(hidden) @ to_qkv).reshape(n, t, 3, heads, each)
        q, k, v = (qkv[:, :, j].transpose(1, 2) for j in range(3))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        hidden = hidden + mixed.transpose(1, 2).reshape(n * t, -1) @ to_hidden
        hidden = hidden + torch.relu(normalised(hidden) @ up) @ down
    return functional.cross_entropy(normalised(hidden) @ out, following.reshape(-1).long())


def normalised(x):
    return functional.layer_norm(x, x.shape[-1:])


LOSSES = {"MLP": mlp_loss, "CNN": cnn_loss, "transformer": transformer_loss}


if __name__ == "__main__":
    main()
