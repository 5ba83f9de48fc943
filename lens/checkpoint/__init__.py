"""One pretrained model, taken apart: loading, trunk, readout, tie."""
