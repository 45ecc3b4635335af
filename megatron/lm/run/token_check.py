"""Compare all training tokens with the checkpoint's once `data.token_digests` has read them, before the next save.

A resume compares samples of the tokens at once. The digest of all tokens is known at the start if an earlier start has kept it, or if there
are at most `SMALL` bytes to read; otherwise a thread computes it while the run trains. A save of a resumed run waits for it, so that no
checkpoint is published on other tokens. A run that must leave (SIGTERM, a time limit) does not wait: its checkpoint keeps the digest of the
one before, and the next resume compares it. A new run has nothing to compare: its checkpoints before that have no digest, and a line
reports each.
"""

import torch.distributed as dist

from megatron.lm.data.reading.token_digests import SMALL, TokenDigests, awaited, verify
from megatron.lm.run.watchdog import Watchdog
from megatron.lm.training.state import Training

_LOOK = 1.0  # seconds between two exchanges while a save waits


class TokenCheck:
    """Methods are collective.

    Args:
        training: its `data` gets the digests.
        digests: of the training data.
        watchdog: learns how far a wait is.

    Raises:
        ValueError: in each method, on every rank: the tokens are not the checkpoint's, or cannot be read.
    """

    def __init__(self, training: Training, digests: TokenDigests, watchdog: Watchdog) -> None:
        self.training, self.digests, self.watchdog = training, digests, watchdog
        self._done = False

    def before_load(self) -> None:
        """Wait for small data, so that a resume is refused at once."""
        left = self._look()
        if left <= SMALL:
            self._wait(left)

    def before_save(self, *, leaving: bool) -> None:
        """Wait if a digest of the checkpoint is still to be compared; print a line if a checkpoint will lack its own.

        Args:
            leaving: whether the run is being stopped.
        """
        left = self._look()
        if not left:
            return
        resumed = self.training.data is not None and awaited(self.training.data, self.digests)
        size = f"{left / 1e9:.2f} GB of the training data are not hashed yet"
        if left <= SMALL or (resumed and not leaving):
            self._say(f"saving waits: {size}, and all tokens must equal the checkpoint's in {self._loaded}", when=left > SMALL)
            self._wait(left)
        elif resumed:
            self._say(f"{size}: this run leaves before all tokens were compared with the checkpoint's, and the next resume compares them")
        else:
            self._say(f"{size}: this checkpoint has digests only of samples of its tokens")

    def at_end(self) -> None:
        """Compare once more where nothing is saved; print a line if not all tokens were compared."""
        if self._look() and self.training.data is not None and awaited(self.training.data, self.digests):
            self._say("the run ends before all its tokens were compared with the checkpoint's")

    @property
    def _loaded(self) -> str | None:
        return self.training.config.checkpoint.load

    def _look(self) -> int:
        """Exchange and compare; return the bytes that are not read yet."""
        if self._done or self.training.data is None:
            return 0
        left = self.digests.exchange()
        for line in verify(self.training.data, self.digests, self._loaded, override=self.training.config.data.override_data):
            self._say(line)
        self._done = not left
        return left

    def _wait(self, left: int) -> None:
        while left:
            self.digests.wait(_LOOK)
            before, left = left, self._look()
            if left < before:  # a disk that does not answer is the watchdog's
                self.watchdog.at("hashing the training data")

    def _say(self, line: str, *, when: bool = True) -> None:
        if when and dist.get_rank() == 0:
            print(line, flush=True)
