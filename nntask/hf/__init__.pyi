from .model_directory import attach_weights, read_values, weight_ranges

__all__ = ["attach_weights", "read_values", "weight_ranges"]
