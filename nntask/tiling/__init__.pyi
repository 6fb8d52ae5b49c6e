from .model_tiling import Limits, ModelTiling, cut, generation_tiling, table_limits

__all__ = ["Limits", "ModelTiling", "cut", "generation_tiling", "table_limits"]
