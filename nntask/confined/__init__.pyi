from .process import Allowance, ConfinedProcess, ConfinedRequest, RequestLimits, Subject, Wording

__all__ = ["Allowance", "ConfinedProcess", "ConfinedRequest", "RequestLimits", "Subject", "Wording"]
