import torch
from loop import train
from torch.nn.parallel import DistributedDataParallel

torch.distributed.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)


def step():
    optimizer.zero_grad()
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()


train(step, torch.distributed.get_rank())
