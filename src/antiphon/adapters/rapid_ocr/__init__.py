"""RapidOCR: an image reader, which runs in a lane. The library contains its weights."""

from antiphon.adapters.spec import Spec

SPEC = Spec(role="image_reader", model="antiphon.adapters.rapid_ocr.reader:RapidOcr", runs_on="lane", extra="video")
