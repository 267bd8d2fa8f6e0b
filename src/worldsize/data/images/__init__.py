"""One encoded image to uint8 pixels, and uint8 pixels to what the network takes: decoding, crops, normalization.

`pillow` and `native` decode to the same pixels.
"""
