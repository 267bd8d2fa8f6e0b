"""`worldsize labels`: training images whose labels are probably wrong."""
