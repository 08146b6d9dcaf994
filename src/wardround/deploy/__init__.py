"""A trained predictor as files that a hospital can keep and use: the model, the same as ONNX, and a model card."""
