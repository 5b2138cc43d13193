"""Between a learner's device and the network, which reads and writes host memory."""

import torch
from torch import Tensor


class Staging:
    """Copies to and from host memory. On CUDA through pinned memory on a stream beside the computation's own; on the
    CPU nothing is copied."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def to_host(self, tensor: Tensor) -> Tensor:
        """`tensor` in host memory; returns when it is there."""
        if self._stream is None or tensor.device.type == "cpu":
            return tensor.detach()
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)
        self._stream.synchronize()
        return host

    def empty_like(self, tensor: Tensor) -> Tensor:
        """Host memory to receive into."""
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._stream is not None)

    def to_device(self, host: Tensor) -> Tensor:
        """`host` on the device, ready for what the computation's stream does next."""
        if self._stream is None:
            return host
        with torch.cuda.stream(self._stream):
            tensor = host.to(self._device, non_blocking=True)
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        tensor.record_stream(current)
        return tensor
