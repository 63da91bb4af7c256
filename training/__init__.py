"""How the embedded model was made: the text it learned from, its twin in plain torch, training and export."""
