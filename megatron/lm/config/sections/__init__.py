"""The settings, one file per subject, and how a setting is declared (`schema`)."""
