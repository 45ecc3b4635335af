#!/bin/bash
# Keras and PyTorch-Ignite take a first score of NaN for the best for ever: the model that is saved and restored as the best is the one with NaN.
#
# Seen with keras 3.15.1, pytorch-ignite 0.5.5 and torch 2.13.0 on a CPU, Linux x86-64. Every later score is compared with the NaN, which is false, by
# Keras' ModelCheckpoint(save_best_only=True), EarlyStopping and ReduceLROnPlateau and by Ignite's Checkpoint(score_function=...). One evaluation
# whose loss overflows in FP16, or a rate that is 0 / 0, is enough: nothing is saved from then on, Keras stops a run that improves at each epoch,
# restores the weights of the first, and lowers the learning rate. Ignite's EarlyStopping takes NaN for better than any score, and any score for
# better than NaN: a run that gets worse goes on. Nothing is reported, and the docstrings do not name NaN. Right: stop at the first NaN (Keras'
# TerminateOnNaN looks at batches of training only), or a score of infinity in its place.
#
# Exit code 0: as described; 1: the behaviour has changed. It needs some minutes, and gigabytes where pip has no build of torch for CPUs.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet "${TORCH:-torch==2.13.0}" "${IGNITE:-pytorch-ignite==0.5.5}" "${KERAS:-keras==3.15.1}" numpy==2.4.6
cat > best.py <<'PROGRAM'
import logging
import os
import tempfile

os.environ["KERAS_BACKEND"] = "torch"
import keras
import numpy as np
import torch
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint, DiskSaver, EarlyStopping

logging.disable()
NAN = float("nan")


def keras_run(create, losses) -> tuple[keras.Model, keras.callbacks.Callback, int]:
    """Call a callback as `fit` does after each epoch with the next `val_loss`; the weight is the epoch's number, from 1."""
    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    model.compile("sgd", "mse")
    callback = create()
    callback.set_model(model)
    callback.set_params({"epochs": len(losses), "steps": 1})
    model.stop_training = False
    callback.on_train_begin()
    for epoch, loss in enumerate(losses):
        model.set_weights([np.full((1, 1), epoch + 1.0)])
        callback.on_epoch_begin(epoch)
        callback.on_epoch_end(epoch, {"val_loss": loss})
        if model.stop_training:
            break
    callback.on_train_end()
    return model, callback, epoch + 1


def ignite_run(create, scores) -> tuple[object, int]:
    """Evaluations with these scores, until the trainer is told to stop."""
    trainer, evaluator, left = Engine(lambda engine, batch: None), Engine(lambda engine, batch: None), iter(scores)
    handler = create(lambda engine: next(left), trainer)
    evaluator.add_event_handler(Events.COMPLETED, handler)
    for number in range(len(scores)):
        evaluator.run([0])
        if trainer.should_terminate:
            break
    return handler, number + 1


for losses in ((0.9, 0.7, 0.5, 0.4), (NAN, 0.7, 0.5, 0.4)):
    text = ", ".join(map(str, losses))
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "best.weights.h5")
        model, _, _ = keras_run(lambda: keras.callbacks.ModelCheckpoint(path, save_best_only=True, save_weights_only=True), losses)
        model.load_weights(path)
        print(f"Keras ModelCheckpoint, losses {text}: the file is of epoch {model.get_weights()[0].item():.0f}")
    model, _, last = keras_run(lambda: keras.callbacks.EarlyStopping(patience=2, restore_best_weights=True), losses)
    print(f"Keras EarlyStopping, losses {text}: {last} epochs, then the weights of epoch {model.get_weights()[0].item():.0f}")
    model, _, _ = keras_run(lambda: keras.callbacks.ReduceLROnPlateau(patience=1), losses)
    print(f"Keras ReduceLROnPlateau, losses {text}: learning rate {float(model.optimizer.learning_rate):.0e} of 1e-02")

for kept in (1, 2):
    for scores in ((0.1, 0.5, 0.9), (NAN, 0.5, 0.9)):
        with tempfile.TemporaryDirectory() as folder:
            saver, options = DiskSaver(folder, require_empty=False), {"n_saved": kept, "score_name": "score"}
            ignite_run(lambda score, _: Checkpoint({"model": torch.nn.Linear(1, 1)}, saver, score_function=score, **options), scores)
            names = sorted(name.removeprefix("model_score=").removesuffix(".pt") for name in os.listdir(folder))
        print(f"Ignite Checkpoint, n_saved={kept}, scores {', '.join(map(str, scores))}: keeps {' and '.join(names)}")
for scores in ((1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4), (1.0, 0.9, NAN, 0.8, 0.7, NAN, 0.6)):
    handler, last = ignite_run(lambda score, trainer: EarlyStopping(patience=3, score_function=score, trainer=trainer), scores)
    print(f"Ignite EarlyStopping(patience=3), scores {', '.join(map(str, scores))}: {last} evaluations, best {handler.best_score}")
PROGRAM
OMP_NUM_THREADS=1 venv/bin/python -W ignore best.py 2> log | tee seen || { cat log; exit 1; }
diff seen - <<'EXPECTED' || { echo "changed: see the lines above"; exit 1; }
Keras ModelCheckpoint, losses 0.9, 0.7, 0.5, 0.4: the file is of epoch 4
Keras EarlyStopping, losses 0.9, 0.7, 0.5, 0.4: 4 epochs, then the weights of epoch 4
Keras ReduceLROnPlateau, losses 0.9, 0.7, 0.5, 0.4: learning rate 1e-02 of 1e-02
Keras ModelCheckpoint, losses nan, 0.7, 0.5, 0.4: the file is of epoch 1
Keras EarlyStopping, losses nan, 0.7, 0.5, 0.4: 3 epochs, then the weights of epoch 1
Keras ReduceLROnPlateau, losses nan, 0.7, 0.5, 0.4: learning rate 1e-05 of 1e-02
Ignite Checkpoint, n_saved=1, scores 0.1, 0.5, 0.9: keeps 0.9000
Ignite Checkpoint, n_saved=1, scores nan, 0.5, 0.9: keeps nan
Ignite Checkpoint, n_saved=2, scores 0.1, 0.5, 0.9: keeps 0.5000 and 0.9000
Ignite Checkpoint, n_saved=2, scores nan, 0.5, 0.9: keeps 0.5000 and nan
Ignite EarlyStopping(patience=3), scores 1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4: 4 evaluations, best 1.0
Ignite EarlyStopping(patience=3), scores 1.0, 0.9, nan, 0.8, 0.7, nan, 0.6: 7 evaluations, best 0.6
EXPECTED
