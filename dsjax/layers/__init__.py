"""Building blocks of the family's layers. Weights keep the checkpoint's [out, in] order."""
