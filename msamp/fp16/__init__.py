"""FP16 mixed precision with loss scaling (Micikevicius et al. 2017); its public name is `msamp.amp`."""
