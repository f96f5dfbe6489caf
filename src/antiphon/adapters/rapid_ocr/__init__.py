"""RapidOCR: a reader of the text on images."""
