from .process import ConfinedProcess, ConfinedRequest, RequestLimits, Subject, Wording

__all__ = ["ConfinedProcess", "ConfinedRequest", "RequestLimits", "Subject", "Wording"]
