"""A small training in processes of its own, for the tests of `fit`: several at once, or one that is killed."""

import os
import signal
import socket

import torch
from torch.distributed.tensor import DTensor

import tiny_models
from collab.recipes.fitting_loop import fit
from collab.recipes.settings import FitSettings


def examples(count=11, length=7):
    """Sentences of random tokens, each with its class."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, tiny_models.VOCABULARY, (count, length), generator=generator)
    return [{"input_ids": row, "labels": torch.tensor(index % 2)} for index, row in enumerate(ids)]


def settings(**given):
    """Two epochs of batches of 5, 5 and 1: the last one does not go around two processes."""
    common = {"batch_size": 5, "epochs": 2, "learning_rate": 1e-3, "log_every": 1, "seed": 1, "device": "cpu"}
    return FitSettings(**(common | given))


def train(folder, *, dropout=0.0, kill=None, **given):
    """A training into a folder; `kill` is the step after which the process ends itself, with no chance to tidy up.

    On one thread: sums are then taken in one order, in this process as in forked ones.
    """
    model = tiny_models.tiny("BertForSequenceClassification", hidden_dropout_prob=dropout)
    is_sharded = set()

    def after_step(step, seen):
        is_sharded.add(all(isinstance(parameter, DTensor) for parameter in seen.parameters()))
        if step == kill:
            os.kill(os.getpid(), signal.SIGKILL)

    chosen = settings(**given)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        result = fit(model, examples(), chosen, folder, after_step=after_step, progress=False)
    finally:
        torch.set_num_threads(threads)
    assert is_sharded <= {chosen.fsdp}, is_sharded
    return result, model.state_dict()


def in_processes(count, function):
    """Call a function in forked processes that know of each other as torchrun's do. Returns how each of them ended.

    Forked, since starting Python with these libraries anew takes many times longer than the training.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(count):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                known = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_PORT": port}
                os.environ.update({key: str(value) for key, value in known.items()}, MASTER_ADDR="127.0.0.1")
                function()
                status = 0
            finally:
                os._exit(status)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
