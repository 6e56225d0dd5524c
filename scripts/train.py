#!/usr/bin/env python
"""Train a classifier of handwritten digits, on as many ranks as mpirun starts.

    mpirun -n 4 python scripts/train.py

The data are scikit-learn's digits: 1,797 real images of 8 x 8 pixels. The model
is a multi-layer perceptron with its gradients written out, so that the whole
way from a batch to an update can be read here. It runs unchanged on one rank or
many, on CPUs (NumPy) or GPUs (CuPy), and needs only the public API of distrt.
"""

import argparse
import contextlib
import json
import time
from pathlib import Path

import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from sklearn.datasets import load_digits

import distrt

CLASSES = 10
HIDDEN = 64


# 1. The data: every rank loads the same images and holds back the same fifth for
# the test. Which images a rank will train on is the strategy's business.
def load_data(dtype):
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = (digits.data[order] / 16.0).astype(dtype)
    labels = digits.target[order].astype(np.int64)
    held_back = len(labels) // 5
    train = (images[held_back:], labels[held_back:])
    test = (images[:held_back], labels[:held_back])
    return train, test


# 2. The model: variables created in the strategy's scope start from rank 0's
# values on all ranks, and stay equal because all ranks apply the same updates.
def make_model(pixels, dtype, seed):
    rng = np.random.default_rng(seed)

    def weights(rows, columns):
        spread = np.sqrt(6.0 / (rows + columns))
        return rng.uniform(-spread, spread, (rows, columns)).astype(dtype)

    return {
        "w1": distrt.Variable(weights(pixels, HIDDEN), name="w1"),
        "b1": distrt.Variable(np.zeros(HIDDEN, dtype), name="b1"),
        "w2": distrt.Variable(weights(HIDDEN, CLASSES), name="w2"),
        "b2": distrt.Variable(np.zeros(CLASSES, dtype), name="b2"),
    }


def forward(model, images):
    xp = distrt.array_namespace(images)
    hidden = xp.tanh(images @ model["w1"].value + model["b1"].value)
    return hidden, hidden @ model["w2"].value + model["b2"].value


# 3. One training step on this rank's part of a global batch; the part may be
# empty. The loss is divided by the *global* batch size, so the gradients of all
# ranks only have to be summed, which apply_gradients does.
def make_train_step(model, optimizer, global_batch_size):
    def train_step(images, labels):
        xp = distrt.array_namespace(images)
        hidden, logits = forward(model, images)

        shifted = logits - xp.max(logits, axis=1, keepdims=True)
        log_softmax = shifted - xp.log(xp.sum(xp.exp(shifted), axis=1, keepdims=True))
        target = (labels[:, None] == xp.arange(CLASSES)).astype(images.dtype)
        loss = -xp.sum(target * log_softmax) / global_batch_size

        d_logits = (xp.exp(log_softmax) - target) / global_batch_size
        d_hidden = (d_logits @ model["w2"].value.T) * (1 - hidden**2)
        gradients = {
            "w1": images.T @ d_hidden,
            "b1": xp.sum(d_hidden, axis=0),
            "w2": hidden.T @ d_logits,
            "b2": xp.sum(d_logits, axis=0),
        }
        optimizer.apply_gradients([(gradients[name], model[name]) for name in model])

        correct = xp.sum(xp.argmax(logits, axis=1) == labels)
        return loss, correct

    return train_step


# 4. One epoch: each rank walks over its own parts of the global batches; the
# epoch's loss and accuracy are summed over the ranks once, at the end.
def train_epoch(strategy, dataset, train_step, samples, on_step):
    started = time.perf_counter()
    losses, corrects, steps = 0.0, 0, 0
    for images, labels in dataset:
        loss, correct = strategy.run(train_step, args=(images, labels))
        losses, corrects, steps = losses + float(loss), corrects + int(correct), steps + 1
        on_step()
    totals = strategy.reduce("SUM", np.array([losses / steps, corrects / samples]), axis=None)
    seconds = time.perf_counter() - started
    return {
        "loss": float(totals[0]),
        "accuracy": float(totals[1]),
        "samples_per_s": samples / seconds,
    }


# 5. The test counts each image exactly once, on any number of ranks.
def evaluate(strategy, model, test, batch_size):
    dataset = distrt.data.Dataset.from_tensor_slices(test).batch(batch_size)
    correct = 0
    for images, labels in strategy.experimental_distribute_dataset(dataset):
        xp = distrt.array_namespace(images)
        correct += int(xp.sum(xp.argmax(forward(model, images)[1], axis=1) == labels))
    return float(strategy.reduce("SUM", np.int64(correct), axis=None)) / len(test[1])


@contextlib.contextmanager
def progress_bar(shown):
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[text]}"),
    )
    with Progress(*columns, disable=not shown) as progress:
        yield progress


def main():
    options = parse_options()
    train, test = load_data(options.dtype)
    strategy = distrt.MultiWorkerMirroredStrategy(device=options.device)
    communicator = strategy.communicator
    chief = communicator.rank == 0
    samples = len(train[1])

    with strategy.scope():
        model = make_model(train[0].shape[1], options.dtype, options.seed)
        epochs_done = distrt.Variable(np.int64(0), trainable=False, name="epochs_done")
    optimizer = OPTIMIZERS[options.optimizer](options.lr)
    optimizer.build(list(model.values()))
    checkpoint = distrt.train.Checkpoint(model=model, optimizer=optimizer, epochs=epochs_done)
    if options.resume:
        checkpoint.read(options.resume)

    history = []
    train_step = make_train_step(model, optimizer, options.batch_size)
    steps = -(-samples // options.batch_size)
    with progress_bar(chief) as progress:
        for epoch in range(int(epochs_done), options.epochs):
            # A seed for each epoch, so that a resumed run sees the order that
            # the uninterrupted one would have seen.
            dataset = (
                distrt.data.Dataset.from_tensor_slices(train)
                .shuffle(samples, seed=options.seed + epoch)
                .batch(options.batch_size)
                .prefetch(2)
            )
            parts = strategy.experimental_distribute_dataset(dataset)
            task = progress.add_task(f"epoch {epoch + 1:2}/{options.epochs}", total=steps, text="")
            step_done = lambda task=task: progress.advance(task)  # noqa: E731
            result = train_epoch(strategy, parts, train_step, samples, step_done)
            history.append(result)
            text = "loss {loss:.4f}  accuracy {accuracy:.4f}  {samples_per_s:,.0f} samples/s"
            progress.update(task, text=text.format(**result))
            epochs_done.assign(epoch + 1)
            if options.checkpoint:
                checkpoint.write(options.checkpoint)

    accuracy = evaluate(strategy, model, test, options.batch_size)
    devices = communicator.all_gather_object(strategy.device.name)
    library = distrt.world().library
    if chief:
        print(f"test accuracy {accuracy:.4f}")
        print(
            f"{communicator.size} rank(s) on {', '.join(devices)}; {library}; "
            f"all_reduce by {communicator.algorithm_for('all_reduce')}"
        )
        if options.json:
            report = {
                "ranks": communicator.size,
                "devices": devices,
                "mpi": library,
                "epochs": history,
                "test_accuracy": accuracy,
            }
            Path(options.json).write_text(json.dumps(report, indent=1) + "\n")


OPTIMIZERS = {
    "adam": lambda lr: distrt.train.Adam(lr or 0.002),
    "sgd": lambda lr: distrt.train.SGD(lr or 0.5),
    "momentum": lambda lr: distrt.train.SGD(lr or 0.1, momentum=0.9),
    "nesterov": lambda lr: distrt.train.SGD(lr or 0.1, momentum=0.9, nesterov=True),
}


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=20, help="passes over the data")
    parser.add_argument("--batch-size", type=int, default=64, help="global batch size, all ranks")
    parser.add_argument("--lr", type=float, help="learning rate (default: by optimizer)")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adam")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--device", choices=["auto", "cpu", "gpu"], default="auto")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the shuffles")
    parser.add_argument("--checkpoint", default="checkpoint.safetensors", help="'' for none")
    parser.add_argument("--resume", metavar="FILE", help="go on from this checkpoint")
    parser.add_argument("--json", metavar="FILE", help="write a report")
    options = parser.parse_args()
    if options.batch_size < 1 or options.epochs < 0:
        parser.error("--batch-size must be at least 1 and --epochs at least 0")
    return options


if __name__ == "__main__":
    main()
