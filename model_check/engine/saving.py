"""When a run saves, and what it does about a save that failed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from model_check.blackbox.spans import span
from model_check.checkpoint.peers import Peers
from model_check.engine.loop import StepInfo
from model_check.errors import CheckpointError

if TYPE_CHECKING:
    from model_check.checkpoint.saver import Saved
    from model_check.engine.session import Session


class Saving:
    """The saves of one run: due every `checkpoint.interval` steps, at the end, and when the run is asked to stop."""

    def __init__(
        self,
        session: Session,
        peers: Peers,
        *,
        name: str,
        last_step: int,
        lineage: Path | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Collective. `lineage` is the one to go on saving into; None: a new one with this name."""
        # DTensor and sympy come with it: a second that a run without checkpoints does not need.
        from model_check.checkpoint.saver import Retention, Saver

        wanted = session.config.checkpoint
        self._session = session
        self._saver = Saver(
            Path(wanted.dir),
            peers,
            lineage=lineage,
            origin=session.continued,
            name=name,
            background=wanted.async_save,
            retention=Retention(wanted.keep, wanted.keep_every, wanted.keep_best),
        )
        self._last_step = last_step
        self._say = say if session.place.is_first else lambda line: None
        self._interval = wanted.interval
        self._stops_on_failure = wanted.on_full == "stop"
        self._begun: int | None = None
        self._paused: dict[int, float] = {}  # by step, of the saves whose end has not been said yet
        self._prepared = self._interval == 0
        session.train_step.before_update = self._saver.hold_update
        # Running means of a norm and the like: saved, and changed by the next forward, before any update.
        model = session.bare_model
        self._forward_changes_state = bool(model.state_dict().keys() - dict(model.named_parameters()).keys())
        self.committed: int | None = None
        self.failure: CheckpointError | None = None

    @property
    def folder(self) -> Path:
        return self._saver.lineage

    @property
    def shared(self) -> Path | None:
        """The lineage that it would save into, where another run does so already."""
        return self._saver.shared

    @property
    def must_stop(self) -> bool:
        """A save failed, and the configuration says that the run must not go on without one."""
        return self.failure is not None and self._stops_on_failure

    def is_due(self, step: int) -> bool:
        return self._interval > 0 and ((step + 1) % self._interval == 0 or step + 1 == self._last_step)

    def after_step(self, info: StepInfo) -> StepInfo:
        """Reports on saves under way and saves where that is due; the same step, with what training waited for it."""
        self.report()
        if not self._prepared and self._session.place.device.type == "cuda":
            # Now the optimizer has its state, and the GPU has seen the memory of a step.
            self._saver.prepare(self._session.state())
            self._prepared = True
        pause = self._saver.device_wait_s()
        if pause is not None and self._begun in self._paused:
            self._paused[self._begun] += pause
        if self.is_due(info.step):
            pause = self.save(info) + (pause or 0.0)
        return info if pause is None else replace(info, save_pause_s=pause)

    def save(self, info: StepInfo, *, wait: bool = False) -> float:
        """Saves the state after this step; returns the seconds that the host waited for it."""
        began = time.perf_counter()
        self._begun = info.step
        with span("save", str(self._saver.lineage)):
            state = self._session.state()
            extra = self._session.extra(info.step, info.tokens, info.val_loss)
            self._saver.save(info.step, state, extra, wait=wait)
            if self._forward_changes_state:
                self._saver.hold_update()
        pause = self._paused[info.step] = time.perf_counter() - began
        self.report()
        return pause

    def report(self) -> None:
        """Says how the saves that ended since the last call went."""
        for saved in self._saver.poll():
            self._note(saved)

    def _note(self, saved: Saved) -> None:
        if saved.note:
            self._say(f"checkpoint: {saved.note}")
        waited = self._paused.pop(saved.step, 0.0)
        if saved.error is None:
            self.committed = saved.step
            size = f"{saved.bytes / 2**20:.1f} MiB"
            self._say(
                f"checkpoint: step {saved.step} committed, {size} in {saved.seconds:.2f} s, "
                f"training waited {waited:.2f} s: {saved.path}"
            )
            return
        from model_check.checkpoint.saver import UntidyError

        if isinstance(saved.error, UntidyError):
            self.committed = saved.step
        self.failure = saved.error
        self._say(f"checkpoint: {saved.error}")

    def settle(self) -> None:
        """Waits for what is being written: a run that goes back wants the newest that is whole."""
        self._saver.wait()
        self.report()

    def finish(self, last: StepInfo | None) -> None:
        """Saves once more if the run was asked to stop, and waits for pending saves. Raises if the last save failed."""
        if last is not None and last.stop and last.step != self._begun and not self.must_stop:
            self.save(last, wait=True)
        with span("save", str(self._saver.lineage)):
            self._saver.close()
        self.report()
        is_unsaved = self.failure is not None and last is not None and self.committed != last.step
        if is_unsaved and last is not None:
            newest = "this run saved none" if self.committed is None else f"the newest is of step {self.committed}"
            self._say(f"checkpoint: the state after step {last.step} is not saved; {newest}")
        # After a request to stop, unsaved state has its own exit code.
        if self.failure is not None and (self.must_stop or (is_unsaved and last is not None and not last.stop)):
            raise self.failure
