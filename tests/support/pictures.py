"""Small images, and how requests hold them."""

from __future__ import annotations

import base64
import io

from PIL import Image


def png(colour: str, width: int = 40, height: int = 30) -> bytes:
    """Return the file of an image of one colour."""
    made = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(made, "PNG")
    return made.getvalue()


def in_base64(image: bytes) -> str:
    return base64.b64encode(image).decode()


def data_url(image: bytes) -> str:
    return f"data:image/png;base64,{in_base64(image)}"


def image_url(image: bytes) -> dict[str, object]:
    """Return an image as a part of a message, in OpenAI's form."""
    return {"type": "image_url", "image_url": {"url": data_url(image)}}
