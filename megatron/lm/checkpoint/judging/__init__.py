"""What a loadable checkpoint must satisfy: rules for its values (`tensors`), and their use on a save before it is written (`saves`)."""
