"""RapidOCR: a reader of the text on images, in a lane. Its weights come with the library."""

from antiphon.adapters.spec import Spec

SPEC = Spec(role="image_reader", model="antiphon.adapters.rapid_ocr.reader:RapidOcr", runs_on="lane", extra="video")
