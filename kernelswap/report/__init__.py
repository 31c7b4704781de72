"""The report of one swap: the host's evidence becomes values (data), words (words), text and one page of HTML (page)."""
