"""When is a backend built? Before the group returns if it serves every step, others in a thread."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import nullcontext

import torch

from polyattn.errors import describe
from polyattn.runtime.backend import Backend

log = logging.getLogger("polyattn")
_running: set[threading.Thread] = set()

Phases = dict[Backend, tuple[str, ...]]


class Builds:
    """The builds that a group's backends need before they run.

    `waiting` has the candidates that aren't built yet, with their phases, and `failed` those whose
    build failed. `done` counts the candidates that left `waiting`.
    """

    def __init__(self, subject: str):
        self.subject, self.done = subject, 0
        self.waiting: Phases = {}
        self.failed: set[Backend] = set()
        self._names: dict[Backend, str] = {}
        self._first: Phases | None = {}
        self._thread: threading.Thread | None = None

    def add(self, name: str, backend: Backend, phase: str, later: bool) -> None:
        """Build a backend for a phase: with the group, `later` in a thread, or else at once."""
        if type(backend).prepare is Backend.prepare:
            return
        self._names[backend] = name
        if self._first is None:
            if backend in self.waiting:
                self.finish()
            self._build(backend, (phase,))
        elif later and backend not in self._first:
            self.waiting[backend] = (*self.waiting.get(backend, ()), phase)
        else:
            phases = (*self._first.get(backend, ()), *self.waiting.pop(backend, ()), phase)
            self._first[backend] = tuple(dict.fromkeys(phases))

    def start(self, device: torch.device) -> None:
        """Build what must be there; then start the thread for the rest."""
        first, self._first = self._first or {}, None
        for backend, phases in first.items():
            self._build(backend, phases)
        if self.waiting:
            self._thread = threading.Thread(
                target=self._build_waiting, args=(device,), name="polyattn-build", daemon=True
            )
            _running.add(self._thread)
            self._thread.start()

    def ready(self, backend: Backend) -> bool:
        """Whether a backend can run steps now."""
        return backend not in self.waiting and backend not in self.failed

    def finish(self) -> None:
        """Wait until every candidate is built."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        if thread.is_alive():
            log.info("waiting for the builds of %s", self.subject)
        thread.join()

    def _build(self, backend: Backend, phases: tuple[str, ...]) -> None:
        name = self._names[backend]
        log.info("building %s (%s) for %s", name, ", ".join(phases), self.subject)
        began = time.monotonic()
        backend.prepare(phases)
        log.info("%s is built after %.1f s", name, time.monotonic() - began)

    def _build_waiting(self, device: torch.device) -> None:
        try:
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                for backend, phases in list(self.waiting.items()):
                    try:
                        self._build(backend, phases)
                    except (Exception, SystemExit) as error:
                        self.failed.add(backend)
                        why = describe(error)
                        log.warning(
                            "%s does not compete for %s: %s",
                            self._names[backend],
                            self.subject,
                            why,
                        )
                    del self.waiting[backend]
                    self.done += 1
        finally:
            _running.discard(threading.current_thread())


def finish_all() -> None:
    """Wait for every thread that builds, because work on a device would end another thread's capture."""
    for thread in list(_running):
        thread.join()
