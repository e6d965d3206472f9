"""A small one-stage detector in the manner of YOLO: data, model with losses, mean average precision."""
