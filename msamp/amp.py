"""FP16 mixed precision with loss scaling, with the two calls of Apex and of the slides (Micikevicius et al. 2017).

model, optimizer = msamp.amp.initialize(model, optimizer, opt_level="O1")
with msamp.amp.scale_loss(loss, optimizer) as scaled: scaled.backward()
"""

from msamp.fp16.api import initialize, load_state_dict, master_params, scale_loss, scaled_loss, state_dict

__all__ = ["initialize", "load_state_dict", "master_params", "scale_loss", "scaled_loss", "state_dict"]
