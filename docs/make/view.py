"""Makes the screenshots of docs/view.md: trains the demo, opens the viewer on the run and takes them.

python docs/make/view.py                  (CPU only; needs chromium and playwright)
"""

import os
import shutil
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # enough, and leaves cores to other processes
sys.path.insert(0, str(Path(__file__).parents[2]))

from playwright.sync_api import sync_playwright

from benchmarks.view import viewer
from gruppo import GRPOConfig, GRPOTrainer
from gruppo.demo import exact_match, load_task, model_path
from gruppo.demo.run import settings

HERE = Path(__file__).parents[1] / "figures"
STEPS = 15
SIZE = {"width": 1100, "height": 760}


def main() -> None:
    with tempfile.TemporaryDirectory() as place, sync_playwright() as playwright:
        folder = Path(place) / "demo"
        args = GRPOConfig(**settings(folder, STEPS, seed=0))
        GRPOTrainer(model=model_path(), reward_funcs=exact_match, args=args, train_dataset=load_task()[0]).train()
        chromium = shutil.which("chromium") or shutil.which("chromium-browser")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport=SIZE)
        with viewer(folder) as address:
            page.goto(address)
            page.locator("main[data-ready=curves]").wait_for()
            page.get_by_role("status").filter(has_not_text="reading").wait_for()
            page.screenshot(path=HERE / "view-curves.png")
            page.goto(f"{address}#groups?update=5&order=spread")
            page.locator("main[data-ready=groups]").wait_for()
            page.locator("#groups a").first.click()
            page.locator("article").nth(3).wait_for()
            page.screenshot(path=HERE / "view-group.png")
            page.get_by_label("Sort by").select_option("length")
            page.get_by_role("link", name="tokens").first.click()
            page.locator(".tokens").press("ArrowRight")
            page.screenshot(path=HERE / "view-tokens.png", clip={"x": 0, "y": 0, "width": 1100, "height": 440})
        browser.close()


if __name__ == "__main__":
    main()
