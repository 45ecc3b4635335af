"""FP16 mixed precision with loss scaling (Micikevicius et al. 2017); users take it as `msamp.amp`."""
