"""What a network gets right and wrong: ``worldsize eval --details``."""
