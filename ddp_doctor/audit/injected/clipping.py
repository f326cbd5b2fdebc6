"""Observes clipping and loss scaling: in which state gradients are when they are clipped."""

from typing import Any

from ddp_doctor.audit.injected.fingerprints import fingerprints
from ddp_doctor.audit.injected.recorder import Foreign, Recorder, user_line
from ddp_doctor.audit.injected.training import Training

MAX_RECORDS = 40


class Clipping:
    """The loss scalers and clippings of one process."""

    def __init__(self, recorder: Recorder, training: Training) -> None:
        self._recorder, self._training = recorder, training
        self._is_scaled = False
        self._num_records = 0

    def patch_scaler(self, module: Foreign) -> None:
        """Patch torch.amp.grad_scaler."""
        wrap, scaler = self._recorder.wrap, module.GradScaler
        wrap(scaler, "scale", before=self._note_scale)
        wrap(scaler, "unscale_", before=self._note_unscaled)
        wrap(scaler, "step", before=self._note_unscaled)

    def patch_clipping(self, module: Foreign) -> None:
        """Patch torch.nn.utils.clip_grad."""
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            self._recorder.wrap(module, name, before=self._note_clip)

    def _note_scale(self, scaler: Foreign, *args: Any) -> None:
        if scaler.is_enabled():
            scale = float(scaler.get_scale()) if self._training.is_sampled else 0.0
            self._is_scaled = True
            if scale:
                self._training.amp_scale = scale

    def _note_unscaled(self, scaler: Foreign, *args: Any, **kwargs: Any) -> None:
        self._is_scaled = False

    def _note_clip(self, *args: Any, **kwargs: Any) -> None:
        # WHY not the arguments: parameters() is a generator, which can be read only once
        if not self._training.is_sampled or self._num_records >= MAX_RECORDS:
            return
        self._num_records += 1
        self._recorder.emit(
            "clip",
            is_scaled=self._is_scaled and self._training.amp_scale != 1.0,
            scale=self._training.amp_scale,
            next_steps=self._training.next_steps(),
            g=fingerprints(self._training.all_gradients()),
            line=user_line(),
        )
