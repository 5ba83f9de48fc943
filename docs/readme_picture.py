"""Make the picture of README.md: what each layer of Gemma 3 270M predicts.

Run: python docs/readme_picture.py (needs the extras demo and images, and Chromium).
"""

from pathlib import Path

import lens

PROMPT = "The Eiffel Tower is located in the city of"


def main() -> None:
    model = lens.load("demo")
    print(model)
    predictions = model.logit_lens(PROMPT)
    print(predictions.save(Path(__file__).parent / "heatmap.png"))
    last = predictions.select(positions=[len(predictions.input_ids) - 1])
    columns = ["layer", "top_1_token", "top_1_logprob_bits", "entropy_bits", "kl_bits"]
    print(last.to_frame()[columns].iloc[[0, 6, 12, 14, 16, 18]].round(2).to_string(index=False))


if __name__ == "__main__":
    main()
