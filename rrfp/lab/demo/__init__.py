"""`rrfp demo`: a GPT trained across real processes, fixed order beside readiness-driven dispatch."""
