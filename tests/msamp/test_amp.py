import importlib

import msamp
from msamp import amp
from msamp.fp16 import api


def test_the_public_name_is_importable_and_has_apex_s_functions():
    assert msamp.amp is amp is importlib.import_module("msamp.amp")
    assert all(getattr(amp, name) is getattr(api, name) for name in amp.__all__)
