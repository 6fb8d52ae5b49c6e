from .model_tiling import Limits, ModelTiling, cut, default_tiling, generation_tiling, table_limits

__all__ = ["Limits", "ModelTiling", "cut", "default_tiling", "generation_tiling", "table_limits"]
