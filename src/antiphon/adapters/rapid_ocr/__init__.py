"""RapidOCR: reads the text on images."""
