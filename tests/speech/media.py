"""Writes recordings like those of telephones and browsers."""

from pathlib import Path

import av
import numpy as np
from numpy.typing import NDArray


def write_media(
    path: Path, form: str, codec: str, samples: NDArray[np.float32], rate: int, has_video: bool = False, **options: str
) -> Path:
    """Write samples `[channels, T]` in a format of FFmpeg, optionally beside a still picture."""
    layout = {1: "mono", 2: "stereo"}[len(samples)]
    with av.open(str(path), "w", format=form, options=options) as file:
        picture = file.add_stream("mpeg4", rate=10) if has_video else None
        track = file.add_stream(codec, rate=rate)
        track.layout = layout
        if picture is not None:
            picture.width, picture.height, picture.pix_fmt = 32, 32, "yuv420p"
            for number in range(samples.shape[1] * 10 // rate):
                frame = av.VideoFrame(32, 32, "yuv420p")
                frame.pts = number
                file.mux(picture.encode(frame))
            file.mux(picture.encode(None))
        whole = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples), "fltp", layout)
        whole.rate, whole.pts = rate, 0
        fitting = av.AudioResampler(track.format, layout, rate, frame_size=track.codec_context.frame_size)
        for part in [*fitting.resample(whole), *fitting.resample(None)]:
            file.mux(track.encode(part))
        file.mux(track.encode(None))
    return path
