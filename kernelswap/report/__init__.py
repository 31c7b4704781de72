"""The report of one swap: the host's evidence becomes values (data), words, charts, text and one page of HTML."""
